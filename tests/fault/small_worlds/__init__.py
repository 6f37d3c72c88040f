"""Small worlds: every order of crashes, returns and messages of the commit protocol, searched exhaustively."""
