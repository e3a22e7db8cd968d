/* The compiled twin of the classes in pure.py, which document them; the same tests run both.

   It is fast because a hit has no Python frame, the dict is looked up with the argument itself, and the clock is a
   coarse one. In any unusual case the answer is MISS, and the Python code decides.

   Python code may run inside any allocation of an object that is tracked (before 3.12 it may set off a collection),
   any call, and any decrement of a count: it may drop a cache, serve another validity or clear a slot. So an object that
   is used after one of these is owned, objects are consistent before one, and counts are decremented last. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <math.h>
#include <stddef.h>
#include <time.h>

#define FORM 8 /* as in pure.py: raise both when what they offer changes */

static PyObject *miss;      /* what an ArgumentCache returns when it has no answer */
static PyObject *monotonic; /* time.monotonic: the one clock that can be read without a call */

static int takes_no_keywords(PyObject *kwargs, const char *name) {
    if (kwargs == NULL || PyDict_GET_SIZE(kwargs) == 0) return 1;
    PyErr_Format(PyExc_TypeError, "%s takes no keywords", name);
    return 0;
}

/* HitCounter: the counter that an ArgumentCache counts up. */

typedef struct {
    PyObject_HEAD
    Py_ssize_t l1_hits;
} HitCounter;

static PyMemberDef counter_members[] = {
    {"l1_hits", T_PYSSIZET, offsetof(HitCounter, l1_hits), 0, NULL},
    {NULL},
};

static PyTypeObject HitCounterType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.HitCounter",
    .tp_basicsize = sizeof(HitCounter),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_members = counter_members,
    .tp_new = PyType_GenericNew,
};

/* Slot: a value in memory. Tracked by the garbage collector only when its value is, as tuples are. */

typedef struct {
    PyObject_HEAD
    PyObject *value;
    PyObject *generation; /* holds nothing that could lead back here, so it is not visited */
    double fresh_until;
    double stale_until;
    double born_at;
    unsigned int place;
    char used;
} Slot;

static int slot_traverse(Slot *self, visitproc visit, void *arg) {
    Py_VISIT(self->value);
    return 0;
}

static int slot_clear(Slot *self) {
    Py_CLEAR(self->value);
    return 0;
}

static void slot_dealloc(Slot *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, slot_dealloc) /* the value may hold another slot, and so on */
    Py_CLEAR(self->generation);
    Py_CLEAR(self->value);
    PyObject_GC_Del(self);
    Py_TRASHCAN_END
}

static PyObject *slot_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *value, *generation = Py_None;
    PyObject *stale = Py_None;
    double fresh_until, stale_until, born_at = -Py_HUGE_VAL;
    if (!takes_no_keywords(kwargs, "Slot")) return NULL;
    if (!PyArg_ParseTuple(args, "Od|OOd:Slot", &value, &fresh_until, &generation, &stale, &born_at)) return NULL;
    stale_until = stale == Py_None ? fresh_until : PyFloat_AsDouble(stale);
    if (stale_until == -1.0 && PyErr_Occurred()) return NULL;
    Slot *self = PyObject_GC_New(Slot, type);
    if (self == NULL) return NULL;
    Py_INCREF(value);
    self->value = value;
    Py_INCREF(generation);
    self->generation = generation;
    self->fresh_until = fresh_until;
    self->stale_until = stale_until;
    self->born_at = born_at;
    self->place = 0;
    self->used = 0;
    if (PyObject_IS_GC(value)) PyObject_GC_Track(self);
    return (PyObject *)self;
}

static PyObject *slot_release(Slot *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *value = self->value;
    self->fresh_until = self->stale_until = self->born_at = -Py_HUGE_VAL;
    Py_INCREF(Py_None);
    self->value = Py_None;
    Py_XDECREF(value);
    Py_RETURN_NONE;
}

static PyMethodDef slot_methods[] = {
    {"clear", (PyCFunction)slot_release, METH_NOARGS, NULL},
    {NULL},
};

static PyMemberDef slot_members[] = {
    {"value", T_OBJECT_EX, offsetof(Slot, value), READONLY, NULL},
    {"generation", T_OBJECT_EX, offsetof(Slot, generation), READONLY, NULL},
    {"fresh_until", T_DOUBLE, offsetof(Slot, fresh_until), 0, NULL},
    {"stale_until", T_DOUBLE, offsetof(Slot, stale_until), 0, NULL},
    {"born_at", T_DOUBLE, offsetof(Slot, born_at), READONLY, NULL},
    {"place", T_UINT, offsetof(Slot, place), 0, NULL},
    {"used", T_BOOL, offsetof(Slot, used), 0, NULL},
    {NULL},
};

static PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Slot",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)slot_traverse,
    .tp_clear = (inquiry)slot_clear,
    .tp_dealloc = (destructor)slot_dealloc,
    .tp_methods = slot_methods,
    .tp_members = slot_members,
    .tp_new = slot_new,
};

/* Validity: state shared by all entries of one L1. */

typedef struct {
    PyObject_HEAD
    PyObject *clock;
    PyObject *loop; /* a weak reference, or None */
    double trusted_until;
} Validity;

static int validity_traverse(Validity *self, visitproc visit, void *arg) {
    Py_VISIT(self->clock);
    Py_VISIT(self->loop);
    return 0;
}

static int validity_clear(Validity *self) {
    Py_CLEAR(self->loop); /* first: without a loop the clock is not asked */
    Py_CLEAR(self->clock);
    return 0;
}

static void validity_dealloc(Validity *self) {
    PyObject_GC_UnTrack(self);
    validity_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *validity_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *clock, *loop;
    if (!takes_no_keywords(kwargs, "Validity") || !PyArg_ParseTuple(args, "OO:Validity", &clock, &loop)) return NULL;
    if (loop != Py_None && !PyWeakref_CheckRef(loop)) {
        PyErr_SetString(PyExc_TypeError, "loop: a weak reference, or None");
        return NULL;
    }
    Validity *self = (Validity *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(clock);
    self->clock = clock;
    Py_INCREF(loop);
    self->loop = loop;
    self->trusted_until = Py_HUGE_VAL;
    return (PyObject *)self;
}

static PyMemberDef validity_members[] = {
    {"clock", T_OBJECT_EX, offsetof(Validity, clock), READONLY, NULL},
    {"loop", T_OBJECT_EX, offsetof(Validity, loop), READONLY, NULL},
    {"trusted_until", T_DOUBLE, offsetof(Validity, trusted_until), 0, NULL},
    {NULL},
};

static PyTypeObject ValidityType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.Validity",
    .tp_basicsize = sizeof(Validity),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)validity_traverse,
    .tp_clear = (inquiry)validity_clear,
    .tp_dealloc = (destructor)validity_dealloc,
    .tp_members = validity_members,
    .tp_new = validity_new,
};

/* The time, a little ahead: an entry that is fresh by this clock is fresh by the exact one too. */
#ifdef CLOCK_MONOTONIC_COARSE
static double slack = 0.0; /* seconds that the coarse clock may be behind: three of its ticks, 10 ms at least */
#endif

static int validity_now(Validity *self, double *now) {
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

/* Whether the validity's loop is the one that runs here. A loop that runs has its thread's hooks for asynchronous
   generators set to methods of its own; asyncio.get_running_loop() asks the kernel for the process's id on 3.11. */
static int validity_runs_here(Validity *self) {
    PyObject *hook = PyThreadState_Get()->async_gen_firstiter;
    if (hook == NULL || self->loop == NULL || self->loop == Py_None || !PyMethod_Check(hook)) return 0;
    return ((PyWeakReference *)self->loop)->wr_object == PyMethod_GET_SELF(hook);
}

/* ArgumentCache: the hits of one function. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *table; /* from the argument, or a tuple of several, to a slot */
    HitCounter *counter;
    Validity *validity; /* or NULL */
    PyObject *weakrefs;
    Py_ssize_t capacity;
} ArgumentCache;

/* Equal ones of these classes are alike; 1, 1.0 and True are not. */
#define IS_PLAIN(x) (PyLong_CheckExact(x) || PyUnicode_CheckExact(x) || (x) == Py_None)

/* The key under which a call's answer stands, a new reference; NULL without an error if it has none. */
static PyObject *cache_key(PyObject *const *args, Py_ssize_t count) {
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

static PyObject *cache_call(ArgumentCache *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    if (kwnames != NULL && PyTuple_GET_SIZE(kwnames)) {
        PyErr_SetString(PyExc_TypeError, "ArgumentCache takes no keywords");
        return NULL;
    }
    PyObject *key = cache_key(args, PyVectorcall_NARGS(nargsf));
    if (key == NULL) {
        if (PyErr_Occurred()) return NULL;
        goto none;
    }
    /* Not before there is a key, as making one may run anything; comparing plain ones runs nothing. */
    Validity *validity = self->validity;
    Slot *slot = validity == NULL ? NULL : (Slot *)PyDict_GetItemWithError(self->table, key);
    Py_DECREF(key);
    if (slot == NULL) {
        if (PyErr_Occurred()) return NULL;
        goto none;
    }
    if (!validity_runs_here(validity)) goto none;
    PyObject *table = self->table;
    Py_INCREF(validity); /* a clock written in Python may run anything */
    Py_INCREF(table);
    Py_INCREF(slot);
    double now;
    PyObject *answer = NULL;
    if (validity_now(validity, &now)) {
        int is_hit = now < slot->fresh_until && now < validity->trusted_until && slot->value != NULL;
        answer = is_hit ? slot->value : miss;
        Py_INCREF(answer);
        slot->used |= is_hit;
        self->counter->l1_hits += is_hit;
    }
    Py_DECREF(validity); /* in the order of the reference: each may be the end of something that has a destructor */
    Py_DECREF(table);
    Py_DECREF(slot);
    return answer;
none:
    Py_INCREF(miss);
    return miss;
}

static int cache_traverse(ArgumentCache *self, visitproc visit, void *arg) {
    Py_VISIT(self->table);
    Py_VISIT(self->counter);
    Py_VISIT(self->validity);
    return 0;
}

/* The table and the counter stay, and clear themselves, because a call must not find one of them missing. */
static int cache_clear(ArgumentCache *self) {
    Py_CLEAR(self->validity);
    return 0;
}

static void cache_dealloc(ArgumentCache *self) {
    PyObject_GC_UnTrack(self);
    if (self->weakrefs != NULL) PyObject_ClearWeakRefs((PyObject *)self);
    Py_CLEAR(self->validity);
    Py_CLEAR(self->table);
    Py_CLEAR(self->counter);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyObject *cache_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *counter;
    Py_ssize_t capacity;
    if (!takes_no_keywords(kwargs, "ArgumentCache") || !PyArg_ParseTuple(args, "O!n:ArgumentCache", &HitCounterType, &counter, &capacity)) return NULL;
    ArgumentCache *self = (ArgumentCache *)type->tp_alloc(type, 0);
    if (self == NULL) return NULL;
    Py_INCREF(counter);
    self->counter = (HitCounter *)counter;
    self->capacity = capacity;
    self->vectorcall = (vectorcallfunc)cache_call;
    self->table = PyDict_New();
    if (self->table == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

/* Answer from *validity*, or from nowhere if it is NULL. */
static PyObject *cache_answer_from(ArgumentCache *self, PyObject *validity) {
    PyObject *table = PyDict_New();
    if (table == NULL) return NULL;
    PyObject *old_table = self->table, *old_validity = (PyObject *)self->validity;
    Py_XINCREF(validity);
    self->table = table; /* both at once: a value's destructor must not find the new one with the other's old one */
    self->validity = (Validity *)validity;
    Py_DECREF(old_table);
    Py_XDECREF(old_validity);
    Py_RETURN_NONE;
}

static PyObject *cache_serve(ArgumentCache *self, PyObject *validity) {
    if (!PyObject_TypeCheck(validity, &ValidityType)) {
        PyErr_SetString(PyExc_TypeError, "validity: a Validity");
        return NULL;
    }
    return cache_answer_from(self, validity);
}

static PyObject *cache_drop(ArgumentCache *self, PyObject *Py_UNUSED(ignored)) {
    return cache_answer_from(self, NULL);
}

static PyObject *cache_note(ArgumentCache *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 3 || !PyTuple_Check(args[0]) || !PyObject_TypeCheck(args[1], &SlotType)) {
        PyErr_SetString(PyExc_TypeError, "note: a tuple of arguments, a slot, and its validity");
        return NULL;
    }
    PyObject *key = cache_key(((PyTupleObject *)args[0])->ob_item, PyTuple_GET_SIZE(args[0]));
    if (key == NULL) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    int failed = 0;
    if ((PyObject *)self->validity == args[2]) {
        PyObject *table = self->table; /* that of this validity, even if a value's destructor has another one served */
        Py_INCREF(table);
        if (PyDict_GET_SIZE(table) >= self->capacity) PyDict_Clear(table);
        failed = PyDict_SetItem(table, key, args[1]);
        Py_DECREF(table);
    }
    Py_DECREF(key);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static Py_ssize_t cache_length(ArgumentCache *self) {
    return PyDict_GET_SIZE(self->table);
}

static PyMethodDef cache_methods[] = {
    {"serve", (PyCFunction)cache_serve, METH_O, NULL},
    {"drop", (PyCFunction)cache_drop, METH_NOARGS, NULL},
    {"note", (PyCFunction)(void (*)(void))cache_note, METH_FASTCALL, NULL},
    {NULL},
};

static PyMemberDef cache_members[] = {
    {"validity", T_OBJECT, offsetof(ArgumentCache, validity), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ArgumentCache, vectorcall), READONLY, NULL},
    {NULL},
};

static PySequenceMethods cache_as_sequence = {.sq_length = (lenfunc)cache_length};

static PyTypeObject ArgumentCacheType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.ArgumentCache",
    .tp_basicsize = sizeof(ArgumentCache),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(ArgumentCache, vectorcall),
    .tp_weaklistoffset = offsetof(ArgumentCache, weakrefs),
    .tp_call = PyVectorcall_Call,
    .tp_as_sequence = &cache_as_sequence,
    .tp_traverse = (traverseproc)cache_traverse,
    .tp_clear = (inquiry)cache_clear,
    .tp_dealloc = (destructor)cache_dealloc,
    .tp_methods = cache_methods,
    .tp_members = cache_members,
    .tp_new = cache_new,
};

/* FunctionProxy: an object that is called like the function it holds, and binds as functions do. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *function; /* or NULL */
    PyObject *receiver; /* or NULL: what it is bound to */
} FunctionProxy;

static PyObject *proxy_call(FunctionProxy *self, PyObject *const *args, size_t nargsf, PyObject *kwnames) {
    PyObject *called = self->function;
    if (called == NULL) {
        PyErr_SetString(PyExc_AttributeError, "_call");
        return NULL;
    }
    int is_function = PyFunction_Check(called); /* which counts its depth itself; this may be one more of our kind */
    Py_INCREF(called); /* the call may set another */
    if (self->receiver != NULL) {
        PyObject *method = PyMethod_New(called, self->receiver); /* it knows how to put its receiver in front */
        Py_DECREF(called);
        if (method == NULL) return NULL;
        called = method;
    }
    PyObject *answer = NULL;
    if (is_function) {
        answer = PyObject_Vectorcall(called, args, nargsf, kwnames);
    } else if (!Py_EnterRecursiveCall(" while calling what a FunctionProxy holds")) {
        answer = PyObject_Vectorcall(called, args, nargsf, kwnames);
        Py_LeaveRecursiveCall();
    }
    Py_DECREF(called);
    return answer;
}

static int proxy_traverse(FunctionProxy *self, visitproc visit, void *arg) {
    Py_VISIT(self->function);
    Py_VISIT(self->receiver);
    return 0;
}

static int proxy_clear(FunctionProxy *self) {
    Py_CLEAR(self->function);
    Py_CLEAR(self->receiver);
    return 0;
}

static void proxy_dealloc(FunctionProxy *self) {
    PyObject_GC_UnTrack(self);
    Py_TRASHCAN_BEGIN(self, proxy_dealloc) /* as above */
    proxy_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
    Py_TRASHCAN_END
}

static PyObject *proxy_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    FunctionProxy *self = (FunctionProxy *)type->tp_alloc(type, 0);
    if (self != NULL) self->vectorcall = (vectorcallfunc)proxy_call;
    return (PyObject *)self;
}

static PyObject *proxy_bound_to(FunctionProxy *self, PyObject *receiver) {
    FunctionProxy *bound = (FunctionProxy *)proxy_new(Py_TYPE(self), NULL, NULL);
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

static PyObject *proxy_get(PyObject *self, PyObject *instance, PyObject *owner) {
    int is_free = instance != NULL && instance != Py_None && ((FunctionProxy *)self)->receiver == NULL;
    if (is_free) return proxy_bound_to((FunctionProxy *)self, instance);
    Py_INCREF(self);
    return self;
}

static PyTypeObject FunctionProxyType;

/* Before 3.12 a class written in Python does not inherit the fast way to be called, although it inherits the call. */
static PyObject *proxy_init_subclass(PyObject *type, PyObject *Py_UNUSED(ignored)) {
#if PY_VERSION_HEX < 0x030C0000
    if (((PyTypeObject *)type)->tp_call == PyVectorcall_Call) { /* it has no __call__ of its own */
        ((PyTypeObject *)type)->tp_flags |= Py_TPFLAGS_HAVE_VECTORCALL;
        PyType_Modified((PyTypeObject *)type);
    }
#endif
    PyObject *above = PyObject_CallFunctionObjArgs((PyObject *)&PySuper_Type, (PyObject *)&FunctionProxyType, type, NULL);
    if (above == NULL) return NULL;
    PyObject *none = PyObject_CallMethod(above, "__init_subclass__", NULL);
    Py_DECREF(above);
    return none;
}

static PyMethodDef proxy_methods[] = {
    {"__init_subclass__", (PyCFunction)proxy_init_subclass, METH_NOARGS | METH_CLASS, NULL},
    {"bound_to", (PyCFunction)proxy_bound_to, METH_O, NULL},
    {NULL},
};

static PyMemberDef proxy_members[] = {
    {"_call", T_OBJECT_EX, offsetof(FunctionProxy, function), 0, NULL},
    {"_receiver", T_OBJECT, offsetof(FunctionProxy, receiver), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(FunctionProxy, vectorcall), READONLY, NULL},
    {NULL},
};

static PyTypeObject FunctionProxyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "stampede_guard._speed._fast.FunctionProxy",
    .tp_basicsize = sizeof(FunctionProxy),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(FunctionProxy, vectorcall),
    .tp_call = PyVectorcall_Call,
    .tp_traverse = (traverseproc)proxy_traverse,
    .tp_clear = (inquiry)proxy_clear,
    .tp_dealloc = (destructor)proxy_dealloc,
    .tp_descr_get = proxy_get,
    .tp_methods = proxy_methods,
    .tp_members = proxy_members,
    .tp_new = proxy_new,
};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "stampede_guard._speed._fast",
    .m_doc = "The compiled twin of stampede_guard._speed.forms.",
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
    PyTypeObject *types[] = {&HitCounterType, &SlotType, &ValidityType, &ArgumentCacheType, &FunctionProxyType};
    for (size_t i = 0; i < sizeof(types) / sizeof(*types); i++)
        if (PyModule_AddType(module, types[i]) < 0) goto failed;
    return module;
failed:
    Py_DECREF(module);
    return NULL;
}
