"""``raycl tune``: a search over the settings of a recipe by successive halving on Ray Tune."""
