// One library, several instruction sets: who is compiled how, and how a call finds its code.
//
//   src/x.cpp        compiled once per variant, everything inside `namespace phloem::PHLOEM_NS`
//   src/x_api.cpp    compiled once, baseline flags: C entries; also pool, memory, dispatch, program (list in CMakeLists.txt)
//
//   x.h:        namespace phloem { struct XArgs {...};
//               PHLOEM_DECLARE(void, x_run, (const XArgs& args, Spmd& spmd)) }
//   x.cpp:      namespace phloem::PHLOEM_NS { void x_run(const XArgs& args, Spmd& spmd) {...} }
//   x_api.cpp:  PHLOEM_PICK(x_run, variant)(args, spmd);
//
// A weak symbol (an std:: template, say) that several variants emit is taken by the linker from the first object, and the
// baseline's come first; so code that always runs never holds an instruction that the machine may lack.
#pragma once

namespace phloem {

enum Variant : int { kBase = 0, kV3 = 1, kV4 = 2, kV4Vnni = 3, kNumVariants = 4 };

}  // namespace phloem

#if defined(PHLOEM_X86_VARIANTS)
#define PHLOEM_DECLARE(ret, name, args) \
  namespace base { ret name args; }     \
  namespace v3 { ret name args; }       \
  namespace v4 { ret name args; }       \
  namespace v4vnni { ret name args; }
#define PHLOEM_PICK(name, variant)                          \
  ((variant) == ::phloem::kV4Vnni ? &::phloem::v4vnni::name \
   : (variant) == ::phloem::kV4   ? &::phloem::v4::name     \
   : (variant) == ::phloem::kV3   ? &::phloem::v3::name     \
                                  : &::phloem::base::name)
#else
#define PHLOEM_DECLARE(ret, name, args) \
  namespace base { ret name args; }
#define PHLOEM_PICK(name, variant) (static_cast<void>(variant), &::phloem::base::name)
#endif
