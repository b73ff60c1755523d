"""HTTP server for published versions, with a page that compares them and explains their labels."""
