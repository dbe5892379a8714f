"""The file of a benchmark: written after every prompt, continued by the next run with the same settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyssd.bench import summary
from pyssd.bench.prompts import Prompt
from pyssd.errors import OptionError

FORMAT = 1
_SAMPLE = 1 << 20  # bytes at each end of a model file that tell it from others


class Results:
    """Records of finished prompts, in memory and in a file.

    Args:
        path: the JSON file; None = none is written.
        settings: what the records depend on; a file with other settings is not continued.
        session: what is noted about this run (command, machine, commit), beside those before it.
        resume: True = the file must be there; False = it is continued if it is.

    Raises:
        OptionError: the file is no result, has other settings, or is absent with resume=True.
    """

    def __init__(
        self,
        path: Path | None,
        settings: Mapping[str, Any],
        session: Mapping[str, Any],
        *,
        resume: bool = False,
    ) -> None:
        self._path = path
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))  # as it is read back
        self._sessions: list[Any] = []
        self.records: list[dict[str, Any]] = []
        if path is not None and path.exists():
            self._read(path)
        elif resume:
            raise OptionError(
                "there is nothing to resume; leave out --resume, or name the file of an earlier run after --json"
            )
        self._sessions.append(dict(session))

    def _read(self, path: Path) -> None:
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            found, records, sessions = value["settings"], value["records"], value["sessions"]
            known = value["format"] == FORMAT and all("domain" in r and "id" in r for r in records)
        except (ValueError, KeyError, TypeError):
            known = False
        if not known:
            raise OptionError(f"{path} is no result of pyssd bench; name another file after --json")
        for name in dict.fromkeys((*found, *self._settings)):
            if found.get(name) != self._settings.get(name):
                raise OptionError(
                    f"{path} was measured with {name} = {_short(found.get(name))} and not"
                    f" {_short(self._settings.get(name))}; name another file after --json"
                )
        self.records, self._sessions = records, sessions

    def note_warm_up(self, seconds: float) -> None:
        """Note how long the first, unmeasured runs of this session took."""
        self._sessions[-1]["warm_up_seconds"] = round(seconds, 2)

    def has(self, prompt: Prompt) -> bool:
        """Tell whether a prompt is finished."""
        return any(
            record["domain"] == prompt.domain and record["id"] == prompt.id
            for record in self.records
        )

    def add(self, record: dict[str, Any]) -> None:
        """Add a finished prompt and write the file, in one step that an interruption cannot halve."""
        self.records.append(record)
        self.write()

    def write(self) -> None:
        """Write the file, if there is one."""
        if self._path is None:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        value = self.as_dict()
        # a record a line: the figures stay readable, and the file short
        records = ",\n  ".join(json.dumps(record) for record in value.pop("records"))
        head = json.dumps(value, indent=1).removesuffix("\n}")
        text = f'{head},\n "records": [\n  {records}\n ]\n}}\n'
        # beside the file itself: a rename is atomic only within one file system
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_text(text, encoding="utf-8")
        new.replace(self._path)

    def domains(self) -> dict[str, dict[str, Any]]:
        """Return the figures of each domain."""
        seed = int(self._settings.get("seed", 0))
        return {
            name: summary.summarise(records, seed=seed)
            for name, records in summary.by_domain(self.records).items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Return what the file holds."""
        noise = summary.noise(self.records)
        return {
            "format": FORMAT,
            "settings": self._settings,
            "sessions": self._sessions,
            "noisy": summary.is_noisy(self.records),
            "spread": None if noise is None else round(noise, 4),
            "domains": self.domains(),
            "records": self.records,
        }


def model_fingerprint(path: Path) -> dict[str, Any]:
    """Return name, size and a hash of both ends of a file: enough to tell models apart, and quick."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with path.open("rb") as file:
        digest.update(file.read(_SAMPLE))
        file.seek(max(size - _SAMPLE, 0))
        digest.update(file.read(_SAMPLE))
    return {"name": path.name, "bytes": size, "ends_sha256": digest.hexdigest()[:16]}


def prompts_fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the prompts and their order."""
    rows = [[prompt.domain, prompt.id, prompt.text] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
