package trace

import (
	"fmt"
	"strings"

	"holdfast/workflows/task"
)

// FileError says what is wrong with a trace file and where.
type FileError struct {
	File string
	// Line counts from 1; 0 where the file is not made of lines.
	Line int
	// Path is the field: a column, a JSON member, or a path such as
	// [3].traj[5].content; empty where the whole line or file is meant.
	Path string
	// Problem is what is wrong, in words.
	Problem string
	// Offset is the byte within the line (or file, if it has no lines), or -1.
	Offset int64
}

// Error gives file, line, field and problem in one line.
func (e *FileError) Error() string {
	var b strings.Builder
	b.WriteString(e.File)
	if e.Line > 0 {
		fmt.Fprintf(&b, ":%d", e.Line)
	}
	b.WriteString(": ")
	if e.Path != "" {
		b.WriteString(e.Path + ": ")
	}
	b.WriteString(e.Problem)
	if e.Offset >= 0 {
		fmt.Fprintf(&b, " (at byte %d)", e.Offset)
	}
	return b.String()
}

// fileErrorf builds an error without an offset.
func fileErrorf(file string, line int, path, format string, args ...any) *FileError {
	return &FileError{File: file, Line: line, Path: path, Problem: fmt.Sprintf(format, args...), Offset: -1}
}

// jsonFileError places an error of the JSON decoder in its file.
func jsonFileError(file string, line int, path string, err error, start int64) *FileError {
	explained := task.Explain(err, path, start)
	return &FileError{
		File:    file,
		Line:    line,
		Path:    explained.Path,
		Problem: explained.Problem,
		Offset:  explained.Offset,
	}
}

// sessionFileError places what Session.check found.
func sessionFileError(file string, line int, err error) *FileError {
	path, problem, found := strings.Cut(err.Error(), ": ")
	if !found {
		path, problem = "", err.Error()
	}
	return fileErrorf(file, line, path, "%s", problem)
}
