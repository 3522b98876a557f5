// Python in, Python out: reads a snapshot without calling back into Python, and makes the records of records.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "search.hpp"

namespace nb = nanobind;

namespace cdsp {
namespace {

// Limits that keep every sum of tokens exact in a double, and a node id from asking for much memory.
constexpr Tokens kMaxTokens = Tokens(1) << 40;
constexpr Tokens kMaxNode = Tokens(1) << 20;

[[noreturn]] void refuse(const char *field, std::size_t index, const char *rule) {
    throw nb::value_error((std::string(field) + "[" + std::to_string(index) + "]: " + rule).c_str());
}

// A list or tuple, its items borrowed.
class Items {
  public:
    Items(nb::handle sequence, const char *field) : fast_(PySequence_Fast(sequence.ptr(), "a sequence is needed")) {
        if (fast_ == nullptr) {
            PyErr_Clear();
            throw nb::type_error((std::string(field) + ": a sequence is needed").c_str());
        }
    }
    ~Items() { Py_DECREF(fast_); }
    Items(const Items &) = delete;
    Items &operator=(const Items &) = delete;

    std::size_t size() const { return std::size_t(PySequence_Fast_GET_SIZE(fast_)); }
    PyObject *operator[](std::size_t i) const { return PySequence_Fast_GET_ITEM(fast_, Py_ssize_t(i)); }

  private:
    PyObject *fast_;
};

Tokens read_integer(PyObject *item, const char *field, std::size_t index, Tokens limit, const char *rule) {
    if (!PyLong_Check(item)) refuse(field, index, rule);
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || value < 0 || value >= limit) refuse(field, index, rule);
    return value;
}

double read_delay(PyObject *item, std::size_t index) {
    constexpr const char *rule = "a finite number of seconds of at least 0 is needed";
    double value = -1.0;
    if (PyFloat_Check(item)) value = PyFloat_AS_DOUBLE(item);
    else if (PyLong_Check(item)) value = double(read_integer(item, "queue_delays_s", index, kMaxTokens, rule));
    if (!(value >= 0.0) || std::isinf(value)) refuse("queue_delays_s", index, rule);
    return value;
}

class Planner {
  public:
    // Costs are (a, b, c, d) of Eq. 1, or a pair of lists: prompt tokens and seconds.
    Planner(std::vector<std::int32_t> sizes, nb::list costs, Tokens min_chunk_tokens, Tokens page_tokens, bool chunking,
            nb::object chunk_record, nb::object plan_record)
        : sizes_(std::move(sizes)),
          search_(candidates(sizes_, costs), min_chunk_tokens, page_tokens, chunking),
          chunk_record_(std::move(chunk_record)),
          plan_record_(std::move(plan_record)) {}

    // A plan, or the number of the reason why there is none.
    nb::object plan(nb::handle node_ids, nb::handle queue_delays_s, nb::handle free_kv_tokens, Tokens new_tokens,
                    Tokens cached_tokens, nb::handle group, double waited_s, double improvement_rate) {
        if (new_tokens < 1 || new_tokens >= kMaxTokens) throw nb::value_error("new_tokens: at least 1 is needed");
        if (cached_tokens < 0 || cached_tokens >= kMaxTokens) throw nb::value_error("cached_tokens: at least 0 is needed");
        if (!(waited_s >= 0.0) || std::isinf(waited_s)) throw nb::value_error("waited_s: a finite number of seconds of at least 0 is needed");
        if (!(improvement_rate >= 0.0 && improvement_rate < 1.0))
            throw nb::value_error("improvement_rate: a share of at least 0 and below 1 is needed");
        read_instances(node_ids, queue_delays_s, free_kv_tokens);
        read_group(group);
        const Outcome outcome = search_.run(snapshot_, {new_tokens, cached_tokens, improvement_rate, waited_s});
        if (outcome != Outcome::kPlanned) return nb::int_(int(outcome));
        return record(search_.best());
    }

  private:
    static std::vector<Candidate> candidates(const std::vector<std::int32_t> &sizes, nb::list costs) {
        std::vector<Candidate> made;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            nb::tuple cost = nb::cast<nb::tuple>(costs[i]);
            if (cost.size() == 4)
                made.push_back({sizes[i], Cost(nb::cast<double>(cost[0]), nb::cast<double>(cost[1]), nb::cast<double>(cost[2]),
                                               nb::cast<double>(cost[3]))});
            else
                made.push_back({sizes[i], Cost(nb::cast<std::vector<double>>(cost[0]), nb::cast<std::vector<double>>(cost[1]))});
        }
        return made;
    }

    void read_instances(nb::handle node_ids, nb::handle queue_delays_s, nb::handle free_kv_tokens) {
        const Items nodes(node_ids, "node_ids"), delays(queue_delays_s, "queue_delays_s"), free(free_kv_tokens, "free_kv_tokens");
        const std::size_t count = nodes.size();
        if (count == 0) throw nb::value_error("node_ids: at least one instance is needed");
        if (delays.size() != count) throw nb::value_error("queue_delays_s: one entry per entry of node_ids is needed");
        if (free.size() != count) throw nb::value_error("free_kv_tokens: one entry per entry of node_ids is needed");
        snapshot_.node.resize(count);
        snapshot_.delay_s.resize(count);
        snapshot_.free_tokens.resize(count);
        std::int32_t largest = 0;
        for (std::size_t i = 0; i < count; ++i) {
            snapshot_.node[i] = std::int32_t(read_integer(nodes[i], "node_ids", i, kMaxNode, "a number of at least 0 and below 2**20 is needed"));
            largest = std::max(largest, snapshot_.node[i]);
            snapshot_.delay_s[i] = read_delay(delays[i], i);
            snapshot_.free_tokens[i] = read_integer(free[i], "free_kv_tokens", i, kMaxTokens, "a whole number of at least 0 and below 2**40 is needed");
        }
        snapshot_.node_limit = largest + 1;
    }

    void read_group(nb::handle group) {
        const Items members(group, "group");
        snapshot_.initial.clear();
        snapshot_.is_initial.assign(snapshot_.size(), 0);
        snapshot_.has_initial.assign(std::size_t(snapshot_.node_limit), 0);
        constexpr const char *rule = "the position of an instance, named once, is needed";
        for (std::size_t i = 0; i < members.size(); ++i) {
            const auto member = std::size_t(read_integer(members[i], "group", i, Tokens(snapshot_.size()), rule));
            if (snapshot_.is_initial[member]) refuse("group", i, rule);
            snapshot_.initial.push_back(std::int32_t(member));
            snapshot_.is_initial[member] = 1;
            snapshot_.has_initial[std::size_t(snapshot_.node[member])] = 1;
        }
    }

    nb::object record(const Plan &plan) {
        plan.pool->members(plan.chunks.back().group, members_);
        nb::object chunks = nb::steal(PyTuple_New(Py_ssize_t(plan.chunks.size())));
        for (std::size_t i = 0; i < plan.chunks.size(); ++i) {
            const Chunk &chunk = plan.chunks[i];
            const auto size = std::size_t(plan.pool->group(chunk.group).size);
            nb::object instances = nb::steal(PyTuple_New(Py_ssize_t(size)));
            for (std::size_t k = 0; k < size; ++k)
                PyTuple_SET_ITEM(instances.ptr(), Py_ssize_t(k), PyLong_FromLong(members_[k]));
            nb::object made = chunk_record_(chunk.cached_tokens, chunk.tokens, instances, chunk.start_s, chunk.compute_s);
            PyTuple_SET_ITEM(chunks.ptr(), Py_ssize_t(i), made.release().ptr());
        }
        return plan_record_(chunks, plan.ttft_s);
    }

    std::vector<std::int32_t> sizes_;
    Search search_;
    nb::object chunk_record_, plan_record_;
    Snapshot snapshot_;
    std::vector<std::int32_t> members_;
};

}  // namespace
}  // namespace cdsp

NB_MODULE(_core, module) {
    module.attr("SOURCE_DIGEST") = SOURCE_DIGEST;
    nb::class_<cdsp::Planner>(module, "Planner")
        .def(nb::init<std::vector<std::int32_t>, nb::list, cdsp::Tokens, cdsp::Tokens, bool, nb::object, nb::object>())
        .def("plan", &cdsp::Planner::plan);
}
