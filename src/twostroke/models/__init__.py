"""Models as declarations: what they are, what their files hold. numpy, no torch; backends own the arithmetic."""
