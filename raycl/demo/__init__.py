"""The demo: handwritten digits that come with scikit-learn, placed at random on a canvas."""
