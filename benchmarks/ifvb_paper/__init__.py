"""The examples of Godichon-Baggioni, Nguyen & Tran (2024, JASA) again."""
