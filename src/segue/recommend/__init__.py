"""Ids in, ids out. The path of an answer: history → query → search → answer, one module for each step.

    batch, unknown = pack_histories(histories, known)                  # ids → one batch of item numbers
    for rows, queries in encode_queries(model, batch):                 # batch → query vectors
        items, scores = search_items(index, queries, …, rules)         # queries → best items under the rules
    recommendations(known, histories, unknown, ranking)                # numbers → ids with scores

`recommender` composes them. `segue.slim` shares the first and the last step, whose modules import no torch.
"""
