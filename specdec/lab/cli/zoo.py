"""`specdec zoo`: what is in the package, and how good it is."""

from __future__ import annotations


def zoo() -> None:
    """List the models and heads that come with the package.

    Acceptance lengths are those of their cards, with K draft tokens at temperatures 0 and 1.
    """
    import json

    from specdec.lab.show.table import Table
    from specdec.lab.zoo import DRAFTERS, WEIGHTS_DIR

    rows = []
    for name, folder in {"zoo": "target", **{f"zoo:{n}": f for n, f in DRAFTERS.items()}}.items():
        card = json.loads((WEIGHTS_DIR / folder / "card.json").read_text(encoding="utf-8"))
        size = (WEIGHTS_DIR / folder / "model.safetensors").stat().st_size / 1e6
        row = [name, f"{card['model']['num_parameters'] / 1e6:.2f} M", f"{size:.1f}", "", "", ""]
        if found := card["acceptance"]:
            lengths = [found[f"temperature {t}"]["acceptance_length"] for t in (0, 1)]
            row[3:] = [str(found["conditions"]["num_draft_tokens"]), *map("{:.2f}".format, lengths)]
        rows.append(row)
    header = ["name", "parameters", "MB", "K", "acceptance length, T = 0", "T = 1"]
    notes = ("use: specdec evaluate --target zoo --drafter zoo:eagle3",)
    print(Table(header, rows, notes))
