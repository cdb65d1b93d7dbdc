"""Output for people: tables and progress in a terminal, figures, HTML pages."""
