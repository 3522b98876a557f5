"""What the live page is told: rows of a bounded stream, and what they are made of."""
