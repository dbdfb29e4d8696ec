"""Show results of dry runs as text, HTML, SVG and PNG; these modules import only result types."""
