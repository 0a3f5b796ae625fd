"""CORE and CORE-extended."""
