// Package specs has the documents that programs of this project install. The CDI specs beside them are golden files of
// tests.
package specs

import _ "embed"

// HookPath is the path of prestart-hook in the documents.
const HookPath = "/usr/local/sbin/prestart-hook"

// Precreate is a document of oci-hooks(5) for podman. CRI-O does not start if it finds this one in a directory of
// hooks: it has no stage precreate.
//
//go:embed hooks.d/precreate.json
var Precreate string

// CreateRuntime is a document of oci-hooks(5) for CRI-O and podman.
//
//go:embed hooks.d/create-runtime.json
var CreateRuntime string
