"""How the rows of a pass lie: who sees whom, at which positions, with which rotary angles, and what they leave out."""
