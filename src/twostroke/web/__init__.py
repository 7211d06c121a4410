"""The live page: its files, as the server sends them and as a replay holds them. Knows no server and no engine."""
