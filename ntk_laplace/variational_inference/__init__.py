"""Variational inference with the algebra of the Laplace-GGN posterior: VOGGN, LGVA and OGGN ([T20] chapter 4)."""
