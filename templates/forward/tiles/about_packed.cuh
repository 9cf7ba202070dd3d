// Heads that share K and V share tiles, as if they were one: their rows of a query lie side by side.
