"""HTML pages and images of results: run reports, leaderboards, tuning studies and searches."""
