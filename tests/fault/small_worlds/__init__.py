"""Small worlds: an exhaustive search of every order of crashes, returns and messages in the commit protocol."""
