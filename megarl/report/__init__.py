"""`megarl report`: what a run did, as one HTML page that needs no network."""
