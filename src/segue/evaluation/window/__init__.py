"""Evaluation over the days after a timestamp: how many of the items that users meet then are in a list of k.

One case for each user with a history before the time WHEN of `--split time:WHEN` and with a positive event in
(WHEN, WHEN + days]. Events at WHEN itself are neither. The targets are the distinct items of that window.

- recall@k: the share of a user's targets among the first k, averaged over users. All candidates are ranked, other
  targets included, so a user with more than k targets cannot reach 1. Ties count against the scorer. A target that is
  no candidate is a miss.
- hit@k: the share of users with at least one target among the first k.
- Both are also given for warm targets and for cold ones (unseen in training), over the users with any of them.
- p90_coverage@k: the smallest share of the catalogue that makes up 90 % of the items shown. It is low for a model that
  shows the same items to everybody.
- entropy@k: the entropy in nats of the values of `evaluate.interest` among a user's first k, averaged over users.

An embedding of age a is made from the events before WHEN - a. Users, targets and candidates are the same at every age:
users are those with a history at the greatest age, and the seen filter excludes what was seen before WHEN, which a
service knows whatever the age of its embeddings.
"""
