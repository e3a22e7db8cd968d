"""Operations and their options."""
