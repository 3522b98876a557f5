// What Python gives: lists, tuples and numbers, read without calling back into Python.
#pragma once

#include <nanobind/nanobind.h>

#include <cmath>
#include <string>
#include <vector>

#include "cost.hpp"

namespace nb = nanobind;

namespace cdsp {

// Limits that keep every sum of tokens exact in a double, and a node id from asking for much memory.
constexpr Tokens kMaxTokens = Tokens(1) << 40;
constexpr Tokens kMaxNode = Tokens(1) << 20;

[[noreturn]] inline void refuse(const char *field, std::size_t index, const char *rule) {
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

inline Tokens read_integer_above(PyObject *item, const char *field, std::size_t index, Tokens least, Tokens limit, const char *rule) {
    if (!PyLong_Check(item)) refuse(field, index, rule);
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(item, &overflow);
    if (overflow != 0 || value < least || value >= limit) refuse(field, index, rule);
    return value;
}

inline Tokens read_integer(PyObject *item, const char *field, std::size_t index, Tokens limit, const char *rule) {
    return read_integer_above(item, field, index, 0, limit, rule);
}

inline double read_delay(PyObject *item, std::size_t index) {
    constexpr const char *rule = "a finite number of seconds of at least 0 is needed";
    double value = -1.0;
    if (PyFloat_Check(item)) value = PyFloat_AS_DOUBLE(item);
    else if (PyLong_Check(item)) value = double(read_integer(item, "queue_delays_s", index, kMaxTokens, rule));
    if (!(value >= 0.0) || std::isinf(value)) refuse("queue_delays_s", index, rule);
    return value;
}

// Costs are (a, b, c, d) of Eq. 1, or a pair of lists: prompt tokens and seconds.
template <typename Sized> std::vector<Sized> read_costs(const std::vector<std::int32_t> &sizes, nb::list costs) {
    std::vector<Sized> made;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        nb::tuple cost = nb::cast<nb::tuple>(costs[i]);
        if (cost.size() == 4)
            made.push_back({sizes[i], Cost(nb::cast<double>(cost[0]), nb::cast<double>(cost[1]), nb::cast<double>(cost[2]), nb::cast<double>(cost[3]))});
        else
            made.push_back({sizes[i], Cost(nb::cast<std::vector<double>>(cost[0]), nb::cast<std::vector<double>>(cost[1]))});
    }
    return made;
}

// Nodes, delays and room of the instances, of any type that has these three vectors; the largest node id plus 1.
inline std::int32_t read_instances(nb::handle node_ids, nb::handle queue_delays_s, nb::handle free_kv_tokens, std::vector<std::int32_t> &node,
                                   std::vector<double> &delay_s, std::vector<Tokens> &free_tokens) {
    const Items nodes(node_ids, "node_ids"), delays(queue_delays_s, "queue_delays_s"), free(free_kv_tokens, "free_kv_tokens");
    const std::size_t count = nodes.size();
    if (count == 0) throw nb::value_error("node_ids: at least one instance is needed");
    if (delays.size() != count) throw nb::value_error("queue_delays_s: one entry per entry of node_ids is needed");
    if (free.size() != count) throw nb::value_error("free_kv_tokens: one entry per entry of node_ids is needed");
    node.resize(count);
    delay_s.resize(count);
    free_tokens.resize(count);
    std::int32_t largest = 0;
    for (std::size_t i = 0; i < count; ++i) {
        node[i] = std::int32_t(read_integer(nodes[i], "node_ids", i, kMaxNode, "a number of at least 0 and below 2**20 is needed"));
        largest = std::max(largest, node[i]);
        delay_s[i] = read_delay(delays[i], i);
        free_tokens[i] = read_integer(free[i], "free_kv_tokens", i, kMaxTokens, "a whole number of at least 0 and below 2**40 is needed");
    }
    return largest + 1;
}

}  // namespace cdsp
