"""asyncrl-top: what a run does, live and afterwards.

One direction: snapshots → Document (numbers: document.py, build.py) → panes (styled lines: panes.py, pipeline.py) →
a terminal (app.py), plain text (plain.py) or, straight from the Document, JSON. Only app.py, widgets.py and detail.py
import Textual.
"""
