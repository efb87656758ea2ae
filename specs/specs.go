// Package specs has the files that programs of this project install. The CDI specs beside them are golden files for
// tests.
package specs

import _ "embed"

// HookPath is the path of prestart-hook in the hook configurations.
const HookPath = "/usr/local/sbin/prestart-hook"

// Precreate is a hook configuration (oci-hooks(5)) for podman. CRI-O does not start if a hooks directory has it, since
// CRI-O has no stage precreate.
//
//go:embed hooks.d/precreate.json
var Precreate string

// CreateRuntime is a hook configuration (oci-hooks(5)) for CRI-O and podman.
//
//go:embed hooks.d/create-runtime.json
var CreateRuntime string
