// Operator: the compiled front of one declared operator.
//
// It takes one value per parameter, checks what may differ between calls that share a decision, looks the decision up,
// and hands the call over. It may only say yes: on any doubt it calls the Python path, which knows every check and every message.
#pragma once

#include <Python.h>

#include "exchange.h"

namespace fla {

// What all operators share. Borrowed for the life of the module.
struct Environment {
  const ExchangeApi* api = nullptr;
  PyObject* tensor = nullptr;             // torch.Tensor
  PyObject* parameter = nullptr;          // torch.nn.Parameter
  PyObject* dtype = nullptr;              // torch.dtype
  PyObject* is_grad_enabled = nullptr;    // torch.is_grad_enabled
  PyObject* is_inference = nullptr;       // torch.is_inference_mode_enabled
  PyObject* variables = nullptr;          // the dict behind os.environ, bytes to bytes
  PyObject* forced_backend = nullptr;     // ContextVar of use_backend
  PyObject* plain = nullptr;              // makes a tensor contiguous
  PyObject* gates = nullptr;              // tuple of bytes: the variables that can change a decision
  PyGetSetDef* requires_grad = nullptr;   // torch.Tensor.requires_grad, without the attribute look-up
  PyObject *plan_run = nullptr, *plan_forward = nullptr, *plan_route = nullptr, *plan_derived = nullptr;  // names
};

Environment& environment();

// A new reference to the type; null with an exception set on failure.
PyObject* make_operator_type();

// The route of this thread's last call; what facade.last_route() returns.
void note_route(PyObject* route);
PyObject* last_route();

}  // namespace fla
