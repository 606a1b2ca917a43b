"""NanoSAM: language-model pretraining with sharpness-aware optimizers."""

__version__ = "0.1.0"
