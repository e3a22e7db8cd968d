"""The reference service: restaurant menus on Postgres, read through two caches."""
