"""What can go wrong, one class per kind; the message is for a person, the exit code for a shell."""


class FagenError(Exception):
    """Anything that fagen refuses or fails at; `str(error)` may be many lines."""

    exit_code = 1
    failed: "tuple[tuple[str, FagenError], ...]" = ()  # of many schedules: which, and why


class ScheduleError(FagenError):
    """A schedule cannot be read, or says what does not hold together."""


class ExpressionError(FagenError):
    """A mask or a score is not of fagen's language, or none that kernels compute."""

    def __init__(self, sentence: str, column: int = 0) -> None:
        super().__init__(f"column {column}: {sentence}" if column else sentence)
        self.sentence, self.column = sentence, column  # of its text, from 1 on; 0: of no place


class OverBudget(FagenError):  # noqa: N818 - it names what is wrong
    """A schedule asks for more than one SM has."""


class ToolchainError(FagenError):
    """A program or header that is needed is missing, too old, or does not answer."""

    exit_code = 3


class BuildError(FagenError):
    """The compiler failed, or made something that breaks the Plan."""

    exit_code = 4


class RefusedBuild(BuildError):  # noqa: N818 - it names what happened
    """The compiler made a kernel that breaks its Plan: it spills, or its wgmmas do not overlap."""


class CacheError(BuildError):
    """The cache cannot be written, or what lies in it is not its user's alone."""


class DeviceError(FagenError):
    """There is no Hopper GPU, or it refused."""

    exit_code = 5


class VerificationError(FagenError):
    """A kernel ran and its numbers, or its evidence, are wrong."""

    exit_code = 6


class UntunedWarning(UserWarning):
    """A call is served by a schedule that was derived, since none was tuned for its problem."""
