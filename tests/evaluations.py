"""What the tests of the evaluation share."""

import pytest

import eval as evaluation
from runtime.config import UserError


@pytest.fixture
def refused(capsys):
    """refused(cfg, match): an evaluation and its dry run refuse the config with the same sentence. Returns what they say."""

    def check(cfg: evaluation.EvalConfig, match: str) -> str:
        capsys.readouterr()
        with pytest.raises((UserError, FileNotFoundError, PermissionError), match=match) as error:
            evaluation.main(cfg)
        with pytest.raises((UserError, FileNotFoundError, PermissionError), match=match):
            evaluation.main(cfg, dry=True)
        return f"{error.value}\n{capsys.readouterr().out}"

    return check
