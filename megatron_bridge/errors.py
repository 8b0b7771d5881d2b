"""The errors of the bridge."""


class BridgeError(Exception):
    """Base of every error that the bridge raises on purpose."""


class ConversionError(BridgeError, ValueError):
    """A checkpoint or model configuration that does not fit: names tensor, file and shapes."""


class PlanError(BridgeError, ValueError):
    """A layout that cannot be planned, or a plan that fails its proof."""


class QuantizationError(BridgeError, ArithmeticError):
    """Weights that FP8 cannot hold, or scales that are not those of their weight."""


class LayoutError(BridgeError, ValueError):
    """A parallel layout that this machine, or this model, cannot run."""


class TrainingError(BridgeError, ArithmeticError):
    """A training step that must not be taken: its gradients are not finite."""
