"""Record the experts that a mixture selects for each token, and replay them in another forward."""
