"""Parts of ramen for use in other libraries."""
