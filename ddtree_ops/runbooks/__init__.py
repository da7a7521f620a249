"""What to do at three in the morning: a page for a human for each trouble, and a play where one helps.

Pages are Markdown files of this package (`pages/ID.md`) with front matter; plays are playbooks
(`playbooks/runbooks/ID.yml`).
"""
