// Python in, Python out: reads a snapshot without calling back into Python, and makes the records of tetris_planner.py.

#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cmath>
#include <string>

#include "reading.hpp"
#include "search.hpp"

namespace cdsp {
namespace {

class Planner {
  public:
    Planner(std::vector<std::int32_t> sizes, nb::list costs, Tokens min_chunk_tokens, Tokens page_tokens, bool chunking,
            nb::object chunk_record, nb::object plan_record)
        : sizes_(std::move(sizes)),
          search_(read_costs<Candidate>(sizes_, costs), min_chunk_tokens, page_tokens, chunking),
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
        snapshot_.node_limit = read_instances(node_ids, queue_delays_s, free_kv_tokens, snapshot_.node, snapshot_.delay_s, snapshot_.free_tokens);
        read_group(group);
        const Outcome outcome = search_.run(snapshot_, {new_tokens, cached_tokens, improvement_rate, waited_s});
        if (outcome != Outcome::kPlanned) return nb::int_(int(outcome));
        return record(search_.best());
    }

  private:
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

NB_MODULE(_tetris, module) {
    module.attr("SOURCE_DIGEST") = SOURCE_DIGEST;
    nb::class_<cdsp::Planner>(module, "Planner")
        .def(nb::init<std::vector<std::int32_t>, nb::list, cdsp::Tokens, cdsp::Tokens, bool, nb::object, nb::object>())
        .def("plan", &cdsp::Planner::plan);
}
