/* The compiled twin of the classes in _front.py, which say what they mean; the same tests run both.

   Nothing here decides anything new. What makes it fast: no Python frame for a hit, a dict look-up with the
   argument itself, and a coarse clock. Where anything is unusual, the answer is MISS, and Python decides.

   Python code may run inside any allocation of an object that is tracked (before 3.12 it may set off a collection),
   any call, and any decrement of a count: it may drop a front, serve another era or kill an entry. So whatever is
   used after one of these is owned, objects are consistent before one, and counts are decremented last. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <math.h>
#include <stddef.h>
#include <time.h>

#define FORM 4 /* as in _pure.py: raise both when what they offer changes */

static PyObject *miss;      /* what a front returns when it has no answer */
static PyObject *monotonic; /* time.monotonic: the one clock that can be read without a call */

static int takes_no_keywords(PyObject *kwargs, const char *name) {
    if (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes no keywords", name);
    return 0;
}

/* Tally: the counter that a front counts up. */

typedef struct {
    PyObject_HEAD
    Py_ssize_t l1_hits;
} Tally;

static PyMemberDef tally_members[] = {
    {"l1_hits", T_PYSSIZET, offsetof(Tally, l1_hits), 0, NULL},
    {NULL},
};

static PyTypeObject TallyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Tally",
    .tp_basicsize = sizeof(Tally),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_members = tally_members,
    .tp_new = PyType_GenericNew,
};

/* Held: a value in memory. Tracked by the garbage collector only when its value is, as tuples are. */

typedef struct {
    PyObject_HEAD
    PyObject *value;
    PyObject *generation; /* holds nothing that could lead back here, so it is not visited */
    double fresh_until;
    char used;
} Held;

static int held_traverse(Held *self, visitproc visit, void *arg) {
    Py_VISIT(self->value);
    return 0;
}

static int held_clear(Held *self) {
    Py_CLEAR(self->value);
    return 0;
}

static void held_dealloc(Held *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, held_dealloc) /* what is held may hold another, and so on */
    Py_CLEAR(self->generation);
    Py_CLEAR(self->value);
    PyObject_GC_Del(self);
    Py_TRASHCAN_END
}

static PyObject *held_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *value, *generation = Py_None;
    double fresh_until;
    if (!takes_no_keywords(kwargs, "Held")) return NULL;
    if (!PyArg_ParseTuple(args, "Od|O:Held", &value, &fresh_until, &generation)) return NULL;
    Held *self = PyObject_GC_New(Held, type);
    if (self == NULL) return NULL;
    Py_INCREF(value);
    self->value = value;
    Py_INCREF(generation);
    self->generation = generation;
    self->fresh_until = fresh_until;
    self->used = 0;
    if (PyObject_IS_GC(value)) PyObject_GC_Track(self);
    return (PyObject *)self;
}

static PyObject *held_kill(Held *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *value = self->value;
    self->fresh_until = -Py_HUGE_VAL;
    Py_INCREF(Py_None);
    self->value = Py_None;
    Py_XDECREF(value);
    Py_RETURN_NONE;
}

static PyMethodDef held_methods[] = {
    {"kill", (PyCFunction)held_kill, METH_NOARGS, NULL},
    {NULL},
};

static PyMemberDef held_members[] = {
    {"value", T_OBJECT_EX, offsetof(Held, value), READONLY, NULL},
    {"generation", T_OBJECT_EX, offsetof(Held, generation), READONLY, NULL},
    {"fresh_until", T_DOUBLE, offsetof(Held, fresh_until), READONLY, NULL},
    {"used", T_BOOL, offsetof(Held, used), 0, NULL},
    {NULL},
};

static PyTypeObject HeldType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Held",
    .tp_basicsize = sizeof(Held),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)held_traverse,
    .tp_clear = (inquiry)held_clear,
    .tp_dealloc = (destructor)held_dealloc,
    .tp_methods = held_methods,
    .tp_members = held_members,
    .tp_new = held_new,
};

/* Era: what all that one memory holds has in common. */

typedef struct {
    PyObject_HEAD
    PyObject *clock;
    PyObject *loop; /* a weak reference, or None */
    double trusted_until;
} Era;

static int era_traverse(Era *self, visitproc visit, void *arg) {
    Py_VISIT(self->clock);
    Py_VISIT(self->loop);
    return 0;
}

static int era_clear(Era *self) {
    Py_CLEAR(self->loop); /* first: without a loop the clock is not asked */
    Py_CLEAR(self->clock);
    return 0;
}

static void era_dealloc(Era *self) {
    PyObject_GC_UnTrack(self);
    era_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *era_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *clock, *loop;
    if (!takes_no_keywords(kwargs, "Era") || !PyArg_ParseTuple(args, "OO:Era", &clock, &loop)) return NULL;
    if (loop != Py_None && !PyWeakref_CheckRef(loop)) {
        PyErr_SetString(PyExc_TypeError, "loop: a weak reference, or None");
        return NULL;
    }
    Era *self = (Era *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(clock);
    self->clock = clock;
    Py_INCREF(loop);
    self->loop = loop;
    self->trusted_until = Py_HUGE_VAL;
    return (PyObject *)self;
}

static PyMemberDef era_members[] = {
    {"clock", T_OBJECT_EX, offsetof(Era, clock), READONLY, NULL},
    {"loop", T_OBJECT_EX, offsetof(Era, loop), READONLY, NULL},
    {"trusted_until", T_DOUBLE, offsetof(Era, trusted_until), 0, NULL},
    {NULL},
};

static PyTypeObject EraType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Era",
    .tp_basicsize = sizeof(Era),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)era_traverse,
    .tp_clear = (inquiry)era_clear,
    .tp_dealloc = (destructor)era_dealloc,
    .tp_members = era_members,
    .tp_new = era_new,
};

/* The time, a little late: what is certainly fresh is so by this clock too, the rest is for the exact one. */
#ifdef CLOCK_MONOTONIC_COARSE
static double slack = 0.0; /* seconds that the coarse clock may be behind: three of its ticks, 10 ms at least */
#endif

static int era_now(Era *self, double *now) {
#ifdef CLOCK_MONOTONIC_COARSE
    if (self->clock == monotonic) {
        struct timespec spec;
        if (clock_gettime(CLOCK_MONOTONIC_COARSE, &spec) == 0) {
            *now = (double)spec.tv_sec + (double)spec.tv_nsec * 1e-9 + slack;
            return 1;
        }
    }
#endif
    PyObject *number = PyObject_CallNoArgs(self->clock);
    if (number == NULL) return 0;
    *now = PyFloat_AsDouble(number);
    Py_DECREF(number);
    return !PyErr_Occurred();
}

/* Whether the era's loop is the one that runs here. A loop that runs has its thread's hooks for asynchronous
   generators set to methods of its own; asyncio.get_running_loop() asks the kernel for the process's id on 3.11. */
static int era_runs_here(Era *self) {
    PyObject *hook = PyThreadState_Get()->async_gen_firstiter;
    if (hook == NULL || self->loop == NULL || self->loop == Py_None || !PyMethod_Check(hook)) return 0;
    return ((PyWeakReference *)self->loop)->wr_object == PyMethod_GET_SELF(hook);
}

/* Front: the hits of one function. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *table; /* by the argument, or a tuple of several: what is held */
    Tally *tally;
    Era *era; /* or NULL */
    PyObject *weakrefs;
    Py_ssize_t room;
} Front;

/* Equal ones of these classes are alike; 1, 1.0 and True are not. */
#define IS_PLAIN(x) (PyLong_CheckExact(x) || PyUnicode_CheckExact(x) || (x) == Py_None)

/* The key under which a call's answer stands, a new reference; NULL without an error if it has none. */
static PyObject *front_key(PyObject *const *args, Py_ssize_t count) {
    for (Py_ssize_t i = 0; i < count; i++)
        if (!IS_PLAIN(args[i])) return NULL;
    if (count == 1) {
        Py_INCREF(args[0]);
        return args[0];
    }
    PyObject *key = PyTuple_New(count);
    if (key == NULL) return NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_INCREF(args[i]);
        PyTuple_SET_ITEM(key, i, args[i]);
    }
    return key;
}

static PyObject *front_look(Front *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames)) {
        PyErr_SetString(PyExc_TypeError, "a front takes no keywords");
        return NULL;
    }
    PyObject *key = front_key(args, PyVectorcall_NARGS(nargsf));
    if (key == NULL) {
        if (PyErr_Occurred()) return NULL;
        goto none;
    }
    /* Not before there is a key, as making one may run anything; comparing plain ones runs nothing. */
    Era *era = self->era;
    Held *held = era == NULL ? NULL : (Held *)PyDict_GetItemWithError(self->table, key);
    Py_DECREF(key);
    if (held == NULL) {
        if (PyErr_Occurred()) return NULL;
        goto none;
    }
    if (!era_runs_here(era)) goto none;
    PyObject *table = self->table;
    Py_INCREF(era); /* a clock written in Python may run anything */
    Py_INCREF(table);
    Py_INCREF(held);
    double now;
    PyObject *answer = NULL;
    if (era_now(era, &now)) {
        int is_hit = now < held->fresh_until && now < era->trusted_until && held->value != NULL;
        answer = is_hit ? held->value : miss;
        Py_INCREF(answer);
        held->used |= is_hit;
        self->tally->l1_hits += is_hit;
    }
    Py_DECREF(era); /* in the order of the reference: each may be the end of something that has a destructor */
    Py_DECREF(table);
    Py_DECREF(held);
    return answer;
none:
    Py_INCREF(miss);
    return miss;
}

static int front_traverse(Front *self, visitproc visit, void *arg) {
    Py_VISIT(self->table);
    Py_VISIT(self->tally);
    Py_VISIT(self->era);
    return 0;
}

/* The table and the tally stay, and clear themselves: a look must not find one of them missing. */
static int front_clear(Front *self) {
    Py_CLEAR(self->era);
    return 0;
}

static void front_dealloc(Front *self) {
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs((PyObject *)self);
    Py_CLEAR(self->era);
    Py_CLEAR(self->table);
    Py_CLEAR(self->tally);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *front_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *tally;
    Py_ssize_t room;
    if (!takes_no_keywords(kwargs, "Front") || !PyArg_ParseTuple(args, "O!n:Front", &TallyType, &tally, &room)) return NULL;
    Front *self = (Front *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(tally);
    self->tally = (Tally *)tally;
    self->room = room;
    self->vectorcall = (vectorcallfunc)front_look;
    self->table = PyDict_New();
    if (self->table == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Answer from *era*, or from nowhere if it is NULL. */
static PyObject *front_turn_to(Front *self, PyObject *era) {
    PyObject *table = PyDict_New();
    if (table == NULL) return NULL;
    PyObject *old_table = self->table, *old_era = (PyObject *)self->era;
    Py_XINCREF(era);
    self->table = table; /* both at once: whatever a value's end runs must not find the one with the other */
    self->era = (Era *)era;
    Py_DECREF(old_table);
    Py_XDECREF(old_era);
    Py_RETURN_NONE;
}

static PyObject *front_serve(Front *self, PyObject *era) {
    if (!PyObject_TypeCheck(era, &EraType)) {
        PyErr_SetString(PyExc_TypeError, "era: an Era");
        return NULL;
    }
    return front_turn_to(self, era);
}

static PyObject *front_drop(Front *self, PyObject *Py_UNUSED(ignored)) {
    return front_turn_to(self, NULL);
}

static PyObject *front_note(Front *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(args[0]) || !PyObject_TypeCheck(args[1], &HeldType)) {
        PyErr_SetString(PyExc_TypeError, "note: a tuple of arguments, what is held, and its era");
        return NULL;
    }
    PyObject *key = front_key(((PyTupleObject *)args[0])->ob_item, PyTuple_GET_SIZE(args[0]));
    if (key == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    int failed = 0;
    if ((PyObject *)self->era == args[2]) {
        PyObject *table = self->table; /* that of this era, even if the values that go have another served */
        Py_INCREF(table);
        if (PyDict_GET_SIZE(table) >= self->room) PyDict_Clear(table);
        failed = PyDict_SetItem(table, key, args[1]);
        Py_DECREF(table);
    }
    Py_DECREF(key);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t front_length(Front *self) {
    return PyDict_GET_SIZE(self->table);
}

static PyMethodDef front_methods[] = {
    {"serve", (PyCFunction)front_serve, METH_O, NULL},
    {"drop", (PyCFunction)front_drop, METH_NOARGS, NULL},
    {"note", (PyCFunction)(void (*)(void))front_note, METH_FASTCALL, NULL},
    {NULL},
};

static PyMemberDef front_members[] = {
    {"era", T_OBJECT, offsetof(Front, era), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Front, vectorcall), READONLY, NULL},
    {NULL},
};

static PySequenceMethods front_as_sequence = {.sq_length = (lenfunc)front_length};

static PyTypeObject FrontType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Front",
    .tp_basicsize = sizeof(Front),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Front, vectorcall),
    .tp_weaklistoffset = offsetof(Front, weakrefs),
    .tp_call = PyVectorcall_Call,
    .tp_as_sequence = &front_as_sequence,
    .tp_traverse = (traverseproc)front_traverse,
    .tp_clear = (inquiry)front_clear,
    .tp_dealloc = (destructor)front_dealloc,
    .tp_methods = front_methods,
    .tp_members = front_members,
    .tp_new = front_new,
};

/* Callee: an object that is called like the function it holds, and binds as functions do. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* or NULL */
    PyObject *receiver; /* or NULL: what it is bound to */
} Callee;

static PyObject *callee_call(Callee *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    PyObject *called = self->function;
    if (called == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_call");
        return NULL;
    }
    int is_function = PyFunction_Check(called); /* which counts its depth itself; this may be one more of our kind */
    Py_INCREF(called); /* what runs may set another */
    if (self->receiver != NULL) {
        PyObject *method = PyMethod_New(called, self->receiver); /* it knows how to put its receiver in front */
        Py_DECREF(called);
        if (method == NULL) return NULL;
        called = method;
    }
    PyObject *answer = NULL;
    if (is_function) {
        answer = PyObject_Vectorcall(called, args, nargsf, kwnames);
    } else if (!Py_EnterRecursiveCall(" while calling what a Callee holds")) {
        answer = PyObject_Vectorcall(called, args, nargsf, kwnames);
        Py_LeaveRecursiveCall();
    }
    Py_DECREF(called);
    return answer;
}

static int callee_traverse(Callee *self, visitproc visit, void *arg) {
    Py_VISIT(self->function);
    Py_VISIT(self->receiver);
    return 0;
}

static int callee_clear(Callee *self) {
    Py_CLEAR(self->function);
    Py_CLEAR(self->receiver);
    return 0;
}

static void callee_dealloc(Callee *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, callee_dealloc) /* as above */
    callee_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
    Py_TRASHCAN_END
}

static PyObject *callee_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    Callee *self = (Callee *)type->tp_alloc(type, 0);
    if (self != NULL) self->vectorcall = (vectorcallfunc)callee_call;
    return (PyObject *)self;
}

static PyObject *callee_bound_to(Callee *self, PyObject *receiver) {
    Callee *bound = (Callee *)callee_new(Py_TYPE(self), NULL, NULL);
    if (bound == NULL) return NULL;
    if (self->function == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_call");
        Py_DECREF(bound);
        return NULL;
    }
    Py_INCREF(self->function);
    bound->function = self->function;
    bound->receiver = receiver == Py_None ? NULL : receiver;
    Py_XINCREF(bound->receiver);
    PyObject *dict = PyObject_GenericGetDict((PyObject *)self, NULL);
    if (dict == NULL || PyObject_GenericSetDict((PyObject *)bound, dict, NULL) < 0) {
        Py_XDECREF(dict);
        Py_DECREF(bound);
        return NULL;
    }
    Py_DECREF(dict);
    return (PyObject *)bound;
}

static PyObject *callee_get(PyObject *self, PyObject *instance, PyObject *owner) {
    int is_free = instance != NULL && instance != Py_None && ((Callee *)self)->receiver == NULL;
    if (is_free) return callee_bound_to((Callee *)self, instance);
    Py_INCREF(self);
    return self;
}

static PyTypeObject CalleeType;

/* Before 3.12 a class written in Python does not inherit the fast way to be called, although it inherits the call. */
static PyObject *callee_init_subclass(PyObject *type, PyObject *Py_UNUSED(ignored)) {
#if PY_VERSION_HEX < 0x030C0000
    if (((PyTypeObject *)type)->tp_call == PyVectorcall_Call) { /* it has no __call__ of its own */
        ((PyTypeObject *)type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
        PyType_Modified((PyTypeObject *)type);
    }
#endif
    PyObject *above = PyObject_CallFunctionObjArgs((PyObject *)&PySuper_Type, (PyObject *)&CalleeType, type, NULL);
    if (above == NULL) return NULL;
    PyObject *none = PyObject_CallMethod(above, "__init_subclass__", NULL);
    Py_DECREF(above);
    return none;
}

static PyMethodDef callee_methods[] = {
    {"__init_subclass__", (PyCFunction)callee_init_subclass, METH_NOARGS | METH_CLASS, NULL},
    {"bound_to", (PyCFunction)callee_bound_to, METH_O, NULL},
    {NULL},
};

static PyMemberDef callee_members[] = {
    {"_call", T_OBJECT_EX, offsetof(Callee, function), 0, NULL},
    {"_receiver", T_OBJECT, offsetof(Callee, receiver), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Callee, vectorcall), READONLY, NULL},
    {NULL},
};

static PyTypeObject CalleeType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Callee",
    .tp_basicsize = sizeof(Callee),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Callee, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = (traverseproc)callee_traverse,
    .tp_clear = (inquiry)callee_clear,
    .tp_dealloc = (destructor)callee_dealloc,
    .tp_descr_get = callee_get,
    .tp_methods = callee_methods,
    .tp_members = callee_members,
    .tp_new = callee_new,
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "stampede_guard._speed._fast",
    .m_doc = "The compiled twin of stampede_guard._speed.front.",
    .m_size = -1,
};

PyMODINIT_FUNC PyInit__fast(void) {
    PyObject *time = PyImport_ImportModule("time");
    if (time == NULL) return NULL;
    monotonic = PyObject_GetAttrString(time, "monotonic");
    Py_DECREF(time);
    if (monotonic == NULL) return NULL;
#ifdef CLOCK_MONOTONIC_COARSE
    struct timespec tick;
    if (clock_getres(CLOCK_MONOTONIC_COARSE, &tick) == 0)
        slack = 3 * ((double)tick.tv_sec + (double)tick.tv_nsec * 1e-9);
    if (slack < 0.01) slack = 0.01;
#endif
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL) return NULL;
    miss = _PyObject_New(&PyBaseObject_Type);
    if (miss == NULL || PyModule_AddObjectRef(module, "MISS", miss) < 0) goto failed;
    if (PyModule_AddIntConstant(module, "FORM", FORM) < 0) goto failed;
    PyTypeObject *types[] = {&TallyType, &HeldType, &EraType, &FrontType, &CalleeType};
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
        if (PyModule_AddType(module, types[i]) < 0) goto failed;
    return module;
failed:
    Py_DECREF(module);
    return NULL;
}
