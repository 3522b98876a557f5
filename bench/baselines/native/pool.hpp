// The instances that a plan may use, and which of them a group of a given size takes (Tetris, section 5.1).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "cost.hpp"

namespace cdsp {

// All instances as they were read: parallel arrays, an instance is its position.
struct Snapshot {
    std::vector<std::int32_t> node;
    std::vector<double> delay_s;
    std::vector<Tokens> free_tokens;
    std::vector<std::int32_t> initial;      // the group that earlier chunks ran on, in its order
    std::vector<std::uint8_t> is_initial;   // by instance
    std::vector<std::uint8_t> has_initial;  // by node
    std::int32_t node_limit = 0;            // one above the largest node id

    std::size_t size() const { return delay_s.size(); }
};

constexpr std::int32_t kUnknown = -1, kImpossible = -2;

// An instance group: what it adds to its parent group, and what the whole of it amounts to.
struct Group {
    std::int32_t parent;
    std::int32_t size;
    std::int32_t beside_taken;   // of the instances beside the initial group, on its nodes
    std::int32_t partial_node;   // the one node that is in use but not full
    std::int32_t partial_taken;
    std::int32_t first_segment, segments;
    double ready_s;              // largest queue delay
    Tokens least_free_tokens;
};

// The instances with room for their share of a request. Groups form a tree: a child of a group is its extension to a
// larger SP size. Within a node, instances join in the order of (delay, position), so a group is a few whole nodes and
// at most one node in part. Delays that Eq. 2 sets to zero keep their order here: of two instances that are free by
// then, the one that was free first joins first.
class Pool {
  public:
    // Instances with fewer than `least_free_tokens` are left out. `children` is the number of SP sizes.
    void build(const Snapshot &snapshot, Tokens least_free_tokens, std::size_t children) {
        snapshot_ = &snapshot;
        width_ = children;
        entries_.clear();
        nodes_.clear();
        beside_.clear();
        by_delay_.clear();
        groups_.clear();
        children_.clear();
        segments_.clear();
        largest_node_ = 0;

        const std::size_t count = snapshot.size();
        begin_.assign(std::size_t(snapshot.node_limit) + 1, 0);
        for (std::size_t i = 0; i < count; ++i)
            if (snapshot.free_tokens[i] >= least_free_tokens && !snapshot.has_initial[snapshot.node[i]])
                ++begin_[snapshot.node[i] + 1];
        for (std::size_t i = 1; i < begin_.size(); ++i) begin_[i] += begin_[i - 1];
        entries_.resize(std::size_t(begin_.back()));
        filled_.assign(begin_.size(), 0);
        for (std::size_t i = 0; i < count; ++i) {
            if (snapshot.free_tokens[i] < least_free_tokens) continue;
            const std::int32_t node = snapshot.node[i];
            const Entry entry{snapshot.delay_s[i], std::int32_t(i)};
            if (!snapshot.has_initial[node])
                insert(entries_.data() + begin_[node], filled_[node]++, entry);
            else if (!snapshot.is_initial[i])
                beside_.push_back(entry);
        }
        std::stable_sort(beside_.begin(), beside_.end(), [](const Entry &x, const Entry &y) { return x.delay_s < y.delay_s; });
        for (std::size_t node = 0; node + 1 < begin_.size(); ++node) {
            const std::int32_t size = begin_[node + 1] - begin_[node];
            if (size == 0) continue;
            nodes_.push_back({begin_[node], size});
            largest_node_ = std::max(largest_node_, size);
        }
        in_use_.assign(nodes_.size(), 0);
        generation_ = 0;
        add_root(least_free_tokens);
    }

    const Group &group(std::int32_t index) const { return groups_[std::size_t(index)]; }

    // The group extended to `size` instances, the SP size of number `which`; kImpossible where there are too few.
    std::int32_t extend(std::int32_t parent, std::size_t which, std::int32_t size) {
        const std::int32_t known = children_[std::size_t(parent) * width_ + which];
        if (known != kUnknown) return known;
        const std::int32_t made = size < groups_[std::size_t(parent)].size || size > available_ ? kImpossible : make(parent, size);
        children_[std::size_t(parent) * width_ + which] = made;
        return made;
    }

    // The members in the order in which they joined, so that every group is a prefix of its extensions.
    void members(std::int32_t index, std::vector<std::int32_t> &out) const {
        const Group &group = groups_[std::size_t(index)];
        if (group.parent == kUnknown) {
            out = snapshot_->initial;
            return;
        }
        members(group.parent, out);
        for (std::int32_t i = group.first_segment; i < group.first_segment + group.segments; ++i) {
            const Segment &segment = segments_[std::size_t(i)];
            const Entry *first = span(segment.node) + segment.first;
            for (std::int32_t k = 0; k < segment.count; ++k) out.push_back(first[k].instance);
        }
    }

  private:
    struct Entry {
        double delay_s;
        std::int32_t instance;
    };
    struct Node {
        std::int32_t begin, size;
    };
    struct Segment {
        std::int32_t node, first, count;
    };
    static constexpr std::int32_t kBeside = -1;  // a segment of `beside_` instead of a node

    // Insertion keeps equal delays in the order of positions.
    static void insert(Entry *first, std::int32_t count, const Entry &entry) {
        std::int32_t at = count;
        for (; at > 0 && first[at - 1].delay_s > entry.delay_s; --at) first[at] = first[at - 1];
        first[at] = entry;
    }

    const Entry *span(std::int32_t node) const {
        return node == kBeside ? beside_.data() : entries_.data() + nodes_[std::size_t(node)].begin;
    }
    double delay_s(std::int32_t node, std::int32_t rank) const { return span(node)[rank].delay_s; }
    std::int32_t node_size(std::int32_t node) const { return nodes_[std::size_t(node)].size; }

    void add_root(Tokens least_free_tokens) {
        Group root{kUnknown, std::int32_t(snapshot_->initial.size()), 0, kUnknown, 0, 0, 0, 0.0,
                   std::numeric_limits<Tokens>::max()};
        available_ = root.size + std::int32_t(entries_.size() + beside_.size());
        for (const std::int32_t member : snapshot_->initial) {
            root.ready_s = std::max(root.ready_s, snapshot_->delay_s[std::size_t(member)]);
            root.least_free_tokens = std::min(root.least_free_tokens, snapshot_->free_tokens[std::size_t(member)]);
        }
        // A member without room for its share cannot be left behind: then no size is possible here.
        if (root.least_free_tokens < least_free_tokens) available_ = 0;
        append(root);
    }

    std::int32_t append(const Group &group) {
        groups_.push_back(group);
        children_.insert(children_.end(), width_, kUnknown);
        return std::int32_t(groups_.size()) - 1;
    }

    void take(Group &group, std::int32_t node, std::int32_t first, std::int32_t count) {
        const Entry *entries = span(node) + first;
        segments_.push_back({node, first, count});
        ++group.segments;
        group.size += count;
        group.ready_s = std::max(group.ready_s, entries[count - 1].delay_s);
        for (std::int32_t i = 0; i < count; ++i)
            group.least_free_tokens = std::min(group.least_free_tokens, snapshot_->free_tokens[std::size_t(entries[i].instance)]);
    }

    std::int32_t make(std::int32_t parent, std::int32_t size) {
        Group group = groups_[std::size_t(parent)];
        group.parent = parent;
        group.first_segment = std::int32_t(segments_.size());
        group.segments = 0;
        fill_nodes_in_use(group, size);
        if (group.size < size) {
            mark_nodes_in_use(parent);
            take_free_nodes(group, size);
        }
        return append(group);
    }

    void fill_nodes_in_use(Group &group, std::int32_t size) {
        const std::int32_t beside = std::min(size - group.size, std::int32_t(beside_.size()) - group.beside_taken);
        if (beside > 0) {
            take(group, kBeside, group.beside_taken, beside);
            group.beside_taken += beside;
        }
        if (group.partial_node == kUnknown || group.size == size) return;
        const std::int32_t node = group.partial_node;
        const std::int32_t count = std::min(size - group.size, node_size(node) - group.partial_taken);
        take(group, node, group.partial_taken, count);
        group.partial_taken += count;
        if (group.partial_taken == node_size(node)) group.partial_node = kUnknown;
    }

    void mark_nodes_in_use(std::int32_t index) {
        ++generation_;
        for (; index != kUnknown; index = groups_[std::size_t(index)].parent) {
            const Group &group = groups_[std::size_t(index)];
            for (std::int32_t i = group.first_segment; i < group.first_segment + group.segments; ++i) {
                const std::int32_t node = segments_[std::size_t(i)].node;
                if (node != kBeside) in_use_[std::size_t(node)] = generation_;
            }
        }
    }

    // Whole nodes, least delayed first, until the rest fits in one; of those the one where it is free first.
    void take_free_nodes(Group &group, std::int32_t size) {
        std::size_t next = 0;
        while (group.size < size) {
            const std::int32_t rest = size - group.size;
            std::int32_t chosen = node_for(rest);
            if (chosen == kUnknown) {
                sort_nodes();
                while (in_use_[std::size_t(by_delay_[next])] == generation_) ++next;
                chosen = by_delay_[next];
            }
            const std::int32_t count = std::min(rest, node_size(chosen));
            take(group, chosen, 0, count);
            in_use_[std::size_t(chosen)] = generation_;
            if (count < node_size(chosen)) {
                group.partial_node = chosen;
                group.partial_taken = count;
            }
        }
    }

    // The free node with the smallest `count`-th shortest delay, the first of equals.
    std::int32_t node_for(std::int32_t count) const {
        if (count > largest_node_) return kUnknown;
        std::int32_t best = kUnknown;
        double best_s = kInfinity;
        for (std::int32_t node = 0; node < std::int32_t(nodes_.size()); ++node) {
            if (node_size(node) < count || in_use_[std::size_t(node)] == generation_) continue;
            const double ready_s = delay_s(node, count - 1);
            if (ready_s < best_s) best_s = ready_s, best = node;
        }
        return best;
    }

    void sort_nodes() {
        if (!by_delay_.empty()) return;
        for (std::int32_t node = 0; node < std::int32_t(nodes_.size()); ++node) by_delay_.push_back(node);
        std::sort(by_delay_.begin(), by_delay_.end(), [this](std::int32_t x, std::int32_t y) {
            const double x_s = delay_s(x, node_size(x) - 1), y_s = delay_s(y, node_size(y) - 1);
            return x_s != y_s ? x_s < y_s : x < y;
        });
    }

    const Snapshot *snapshot_ = nullptr;
    std::size_t width_ = 0;
    std::int32_t available_ = 0, largest_node_ = 0;
    std::vector<Entry> entries_;  // of free nodes, node after node
    std::vector<Entry> beside_;   // on the initial group's nodes
    std::vector<Node> nodes_;     // ascending by id
    std::vector<std::int32_t> begin_, filled_, by_delay_, children_;
    std::vector<std::uint32_t> in_use_;  // by node: the generation that used it
    std::uint32_t generation_ = 0;
    std::vector<Group> groups_;
    std::vector<Segment> segments_;
};

}  // namespace cdsp
