"""Show results of dry runs as text, HTML and charts; these modules import only result types."""
