"""The doctor. A module named ``scatterpar.doctor`` would hide the function of that name."""
