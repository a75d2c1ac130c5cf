"""Aggregation-broadcast operators, by what they combine: factors, products, clusters of clients."""
