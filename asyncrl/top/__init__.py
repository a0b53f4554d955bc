"""asyncrl-top: what a run does, live and afterwards.

One direction: snapshots (replay.py, history.py) → Document (numbers: document.py, made by model.py) → lines and tables
(pipeline.py, panes.py, detail.py) → a terminal (app.py), text or, straight from the Document, JSON. Only app.py and
widgets.py import Textual.
"""
