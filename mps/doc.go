// Package mps keeps the control daemons of NVIDIA's multi-process service (MPS), one for each GPU that is shared by it.
//
//	k := mps.New(mps.Options{Dir: "/run/gpu-cdi-plugin/mps", ...})
//	k.Want(mps.Wants(resources)) // now, and whenever they change
//	err = k.Run(ctx)
//
// What should be done is decided by a pure function (plan.go) from what is wanted and what is seen; the rest of the
// package sees and does. A GPU's minder never waits for another's.
//
// The daemons outlive the plugin, since containers go on without it: each is in a session of its own, and a record of
// its process is on disk before it begins to run. The next plugin takes over what it finds there, if the process is
// still the one that the record was made of.
//
// The containers of a GPU can write in its shared memory, and those that an earlier version started in its pipe directory,
// so everything in there is hostile: no process number is read from there, no link there is followed by what runs on the
// host, and whatever is asked at once has one deadline and bounded answers. Both are file systems of their own (volume.go),
// so that containers fill nothing else. The daemon itself reads what containers send: it can do little to the node
// (confine.go). What containers can do is to disturb each other, as processes of one GPU can under MPS.
//
// It does not know the driver's library or gRPC.
package mps
