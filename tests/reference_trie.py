"""Algorithm 1 and section 4.3 of the Lookahead paper, read straight and written slowly.

Not shared with the library in any line: tests replay text through both and ask that the library's drafts are
accepted at least as often. Where the paper leaves a choice it is taken as methods are usually read: a branch
is a key and the `branch_length` tokens after it; the query suffix runs over prompt and output; the last,
shortest match is used when none holds `min_nodes`; among equal counts the shallower node and then the older
one comes first.
"""


class Node:
    def __init__(self):
        self.children = {}
        self.prompt = 0
        self.output = 0.0

    def below(self):
        """Every path under this node, as (depth, path of tokens, node)."""
        found = []
        stack = [((), self)]
        while stack:
            path, node = stack.pop()
            for token, child in node.children.items():
                found.append(((*path, token), child))
                stack.append(((*path, token), child))
        return found


class ReferenceTrie:
    def __init__(self, branch_length, min_nodes, capacity, max_query_length, prompt_weight, eos):
        self.root = Node()
        self.nodes = 0
        self.branch_length, self.min_nodes, self.capacity = branch_length, min_nodes, capacity
        self.max_query_length, self.prompt_weight, self.eos = max_query_length, prompt_weight, eos

    def branches(self, tokens):
        for start in range(len(tokens)):
            branch = tokens[start : start + self.branch_length + 1]
            if self.eos in branch:
                branch = branch[: branch.index(self.eos) + 1]
            yield branch

    def step(self, node, token):
        if token not in node.children:
            node.children[token] = Node()
            self.nodes += 1
        return node.children[token]

    def insert_prompt(self, prompt, hits=1):
        """Branch inserting; with hits=-1, branch eliminating."""
        for branch in self.branches(prompt):
            node = self.root
            for token in branch:
                node = self.step(node, token)
                node.prompt += hits
        if hits < 0:
            for key in set(prompt) & self.root.children.keys():
                self.drop(self.root.children[key])

    def insert_output_token(self, output):
        """The newest output token, put on the end of each branch that reaches it."""
        for start in range(max(0, len(output) - self.branch_length - 1), len(output)):
            branch = output[start:]
            if self.eos in branch[:-1]:
                continue
            node = self.root
            for token in branch:
                node = self.step(node, token)
            node.output += 1
        if self.nodes > self.capacity:
            for _, node in self.root.below():
                node.output /= 2
            self.drop(self.root)

    def drop(self, node):
        for token, child in list(node.children.items()):
            self.drop(child)
            if child.output < 1 and child.prompt < 1 and not child.children:
                del node.children[token]
                self.nodes -= 1

    def retrieve(self, context, decoding_length):
        """The paths of the draft, as a set of tuples of tokens."""
        found = []
        for length in range(min(self.max_query_length, len(context)), 0, -1):
            node = self.root
            for token in context[-length:]:
                node = node.children.get(token)
                if node is None:
                    break
            if node is None:
                continue
            found = node.below()
            if len(found) >= self.min_nodes:
                break
        found.sort(key=lambda item: (-item[1].prompt * self.prompt_weight - item[1].output, len(item[0])))
        return {path for path, _ in found[:decoding_length]}
