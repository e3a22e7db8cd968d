CREATE TABLE restaurants (
    id integer PRIMARY KEY,
    name text NOT NULL,
    cuisine text NOT NULL,
    currency char(3) NOT NULL,
    updated_at timestamptz NOT NULL,
    version bigint NOT NULL DEFAULT 1 -- of the whole menu: each change of it adds 1
);

CREATE TABLE categories (
    id integer PRIMARY KEY,
    restaurant_id integer NOT NULL REFERENCES restaurants ON DELETE CASCADE,
    position smallint NOT NULL,
    name text NOT NULL,
    UNIQUE (restaurant_id, position)
);

CREATE TABLE items (
    id integer PRIMARY KEY,
    category_id integer NOT NULL REFERENCES categories ON DELETE CASCADE,
    position smallint NOT NULL,
    name text NOT NULL,
    description text NOT NULL,
    price_cents integer NOT NULL CHECK (price_cents >= 0),
    available boolean NOT NULL,
    UNIQUE (category_id, position)
);

CREATE TABLE option_groups (
    id integer PRIMARY KEY,
    item_id integer NOT NULL REFERENCES items ON DELETE CASCADE,
    position smallint NOT NULL,
    name text NOT NULL,
    min_choices smallint NOT NULL,
    max_choices smallint NOT NULL,
    UNIQUE (item_id, position)
);

CREATE TABLE options (
    id integer PRIMARY KEY,
    option_group_id integer NOT NULL REFERENCES option_groups ON DELETE CASCADE,
    position smallint NOT NULL,
    name text NOT NULL,
    price_cents integer NOT NULL CHECK (price_cents >= 0),
    UNIQUE (option_group_id, position)
);
