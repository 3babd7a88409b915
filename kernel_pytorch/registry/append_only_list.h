// A list that only grows, without a lock: a lock held by another thread at a fork() would be held in the child for
// good. For things that are added a few times in a process and looked up off the warm path. Never freed.
#pragma once

#include <atomic>
#include <utility>

namespace kernel_pytorch::registry {

template <class Value>
class AppendOnlyList {
 public:
  template <class Matches>
  const Value* find(const Matches& matches) const {
    for (const Node* node = head_.load(std::memory_order_acquire); node != nullptr; node = node->next) {
      if (matches(node->value)) return &node->value;
    }
    return nullptr;
  }
  const Value& add(Value value) {
    Node* node = new Node{std::move(value), head_.load(std::memory_order_relaxed)};
    while (!head_.compare_exchange_weak(node->next, node, std::memory_order_release, std::memory_order_relaxed)) {
    }
    return node->value;
  }

 private:
  struct Node {
    const Value value;
    Node* next;
  };
  std::atomic<Node*> head_{nullptr};
};

}  // namespace kernel_pytorch::registry
