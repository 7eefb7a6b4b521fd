package wire

// Column is a further array of a sample.
type Column struct {
	Name  string  `json:"name" doc:"Letters, digits, dots, dashes, underscores; unique within the sample."`
	DType string  `json:"dtype" doc:"bool, int8, uint8, int16, uint16, float16, bfloat16, int32, uint32, float32, int64, uint64 or float64."`
	Shape []int64 `json:"shape" nullable:"false" doc:"At most 8 dimensions, each at least 1; none is a single value."`
	Data  []byte  `json:"data" doc:"Base64 of the array in row-major order, little-endian: as many bytes as dtype and shape say."`
}

// NewColumns are arrays for the sample that a session is to become.
type NewColumns struct {
	Columns []Column `json:"columns" nullable:"false" doc:"At most 16 and 32 MiB for a sample, counting those that it has."`
}
