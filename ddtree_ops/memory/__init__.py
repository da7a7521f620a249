"""What a service needs of a card's memory, from the models' config.json: shapes, parts, and what fits."""
