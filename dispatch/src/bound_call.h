// BoundCall: a plan and the values bound to it. Python's Call derives from it.
#pragma once

#include <Python.h>

namespace fla {

struct BoundCall {
  PyObject_HEAD
  PyObject* plan;
  PyObject* values;
};

// A new reference to the type; null with an exception set on failure.
PyObject* make_bound_call_type();

// A BoundCall of `type` (or a subclass). Takes over the reference to `values`, borrows `plan`.
PyObject* make_bound_call(PyTypeObject* type, PyObject* plan, PyObject* values);

}  // namespace fla
