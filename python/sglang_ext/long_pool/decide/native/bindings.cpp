// Python in, Python out: reads a snapshot without calling back into Python, and makes the records of plan.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <cstdio>
#include <string>

#include "price.hpp"
#include "reading.hpp"

namespace cdsp {
namespace {

class PricePlanner {
  public:
    PricePlanner(std::vector<std::int32_t> sizes, nb::list costs, Tokens min_chunk_tokens, Tokens page_tokens, double cross_node_factor,
                 double tardiness_weight, double least_price, std::int32_t most_considered, nb::object placement_record)
        : search_(read_costs<SizeCost>(sizes, costs), {min_chunk_tokens, page_tokens, cross_node_factor, tardiness_weight, least_price, most_considered}),
          record_(std::move(placement_record)) {}

    // Prompts are tuples (new tokens, cached tokens, due, owner or -1, holders), holders a tuple of pairs (position, tokens).
    nb::object place(nb::handle node_ids, nb::handle queue_delays_s, nb::handle free_kv_tokens, nb::handle prompts, double others_price) {
        if (!(others_price >= 0.0) || std::isinf(others_price)) throw nb::value_error("others_price: a finite number of at least 0 is needed");
        instances_.node_limit = read_instances(node_ids, queue_delays_s, free_kv_tokens, instances_.node, instances_.busy_s, instances_.free_tokens);
        const Items given(prompts, "prompts");
        prompts_.resize(given.size());
        for (std::size_t at = 0; at < given.size(); ++at) read_prompt(given[at], at);
        placements_.clear();
        search_.run(instances_, prompts_, others_price, placements_);
        nb::object made = nb::steal(PyList_New(Py_ssize_t(placements_.size())));
        for (std::size_t at = 0; at < placements_.size(); ++at) {
            const Placement &one = placements_[at];
            nb::object group = nb::steal(PyTuple_New(Py_ssize_t(one.group.size())));
            for (std::size_t k = 0; k < one.group.size(); ++k) PyTuple_SET_ITEM(group.ptr(), Py_ssize_t(k), PyLong_FromLong(one.group[k]));
            nb::object record = record_(one.prompt, one.tokens, group, one.start_s, one.compute_s, one.end_s);
            PyList_SET_ITEM(made.ptr(), Py_ssize_t(at), record.release().ptr());
        }
        return made;
    }

  private:
    void read_prompt(PyObject *given, std::size_t at) {
        Prompt &prompt = prompts_[at];
        const Items fields(given, "prompts");
        if (fields.size() != 5) refuse("prompts", at, "five fields are needed");
        prompt.new_tokens = read_integer(fields[0], "new_tokens", at, kMaxTokens, "a whole number is needed");
        prompt.cached_tokens = read_integer(fields[1], "cached_tokens", at, kMaxTokens, "a whole number of at least 0 is needed");
        if (prompt.new_tokens < 1) refuse("new_tokens", at, "at least 1 is needed");
        if (!PyFloat_Check(fields[2]) || std::isnan(PyFloat_AS_DOUBLE(fields[2]))) refuse("due_s", at, "a number is needed");
        prompt.due_s = PyFloat_AS_DOUBLE(fields[2]);
        constexpr const char *owner_rule = "the position of an instance or -1 is needed";
        prompt.owner = std::int32_t(read_integer_above(fields[3], "owner", at, -1, Tokens(instances_.size()), owner_rule));
        const Items holders(fields[4], "holders");
        prompt.holders.clear();
        constexpr const char *rule = "pairs of the position of an instance, named once, and its tokens are needed";
        for (std::size_t k = 0; k < holders.size(); ++k) {
            const Items pair(holders[k], "holders");
            if (pair.size() != 2) refuse("holders", at, rule);
            const auto instance = std::int32_t(read_integer(pair[0], "holders", at, Tokens(instances_.size()), rule));
            for (const Holder &other : prompt.holders)
                if (other.instance == instance) refuse("holders", at, rule);
            prompt.holders.push_back({instance, read_integer(pair[1], "holders", at, kMaxTokens, rule)});
        }
    }

    PriceSearch search_;
    nb::object record_;
    Instances instances_;
    std::vector<Prompt> prompts_;
    std::vector<Placement> placements_;
};

}  // namespace
}  // namespace cdsp

NB_MODULE(_core, module) {
    module.attr("SOURCE_DIGEST") = SOURCE_DIGEST;
    nb::class_<cdsp::PricePlanner>(module, "PricePlanner")
        .def(nb::init<std::vector<std::int32_t>, nb::list, cdsp::Tokens, cdsp::Tokens, double, double, double, std::int32_t, nb::object>())
        .def("place", &cdsp::PricePlanner::place);
}
