"""Aggregation-broadcast operators, grouped by what they combine: factors, products, or clusters of clients."""
