"""asyncrl-top: what a run does, live and afterwards.

One direction: snapshots → Document (numbers: document.py, made by model/) → styled lines (panes/, pipeline.py,
detail.py, frame.py) → a terminal (app.py), plain text (plain.py) or, straight from the Document, JSON. Only app.py,
body.py, keys.py, screens.py and widgets.py import Textual.
"""
